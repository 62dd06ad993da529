#!/usr/bin/env bash
# One run over a TPU pod slice: every host runs the same command, host 0 writes.
#
#     TPU=my-slice ZONE=us-east5-a experiments/launch/tpu_pod.sh \
#         generate --target meta-llama/Llama-3.1-8B --draft meta-llama/Llama-3.2-1B \
#         --dtype bfloat16 --mesh data=2,model=8 --prompts prompts.jsonl \
#         --output gs-mounted/out.jsonl --resume
#
# The hosts find each other (--distributed), and the product of the mesh is the number
# of chips in the slice. The package and the prompts are on every host already:
#     gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all \
#         --command "pip install 'specdec-jax[tpu]'"
set -euo pipefail
printf -v COMMAND '%q ' specdec "$@" --distributed
exec gcloud compute tpus tpu-vm ssh "${TPU:?name of the TPU VM}" \
    --zone "${ZONE:?its zone}" --worker=all --command "$COMMAND"
