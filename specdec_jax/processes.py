"""Many processes, one program: joining them, and saying who did not come.

JAX is the engine: `jax.distributed` connects the processes, and every array of a run is
one array over the devices of all. Each process runs the same calls in the same order,
puts its own rows on its own devices, and the first one writes.
"""

import socket
import time

import jax

_GO = b"go"


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: int = 300,
) -> None:
    """Joins this process to the others; call it before anything touches a device.

    On TPU pods and under SLURM all arguments may be left out: JAX finds them itself.
    With a coordinator given, the processes call their roll first, on the port above
    its own: JAX would end all of them without saying who is missing.

    Args:
      coordinator: Address of process 0, `host:port`.
      num_processes: How many there are.
      process_id: This one's number, from 0.
      timeout_seconds: How long to wait for the others.

    Raises:
      ValueError: An argument is missing or out of range.
      TimeoutError: Processes did not join; the message has their numbers.
    """
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None):
        jax.distributed.initialize(initialization_timeout=timeout_seconds)
        return
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            "coordinator, num_processes and process_id go together, got "
            f"{coordinator}, {num_processes} and {process_id}"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise ValueError(f"coordinator is {coordinator!r}; write host:port")
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id is {process_id}; with {num_processes} processes it goes from "
            f"0 to {num_processes - 1}"
        )
    deadline = time.monotonic() + timeout_seconds
    call = _call_roll if process_id == 0 else _answer
    missing = call(host, int(port) + 1, num_processes, process_id, deadline)
    if missing:
        raise TimeoutError(
            f"of {num_processes} processes these did not join {coordinator} within "
            f"{timeout_seconds} s: {missing}; see what became of them, and start all "
            "of them again"
        )
    jax.distributed.initialize(
        coordinator, num_processes, process_id, initialization_timeout=timeout_seconds
    )


def _call_roll(
    host: str, port: int, num_processes: int, process_id: int, deadline: float
) -> str:
    """Waits for all others; tells them, and returns, who is missing."""
    del host, process_id
    present: dict[int, socket.socket] = {}
    with socket.create_server(("", port)) as server:
        while len(present) < num_processes - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                break
            number = int.from_bytes(connection.recv(4), "big")
            if 0 < number < num_processes:
                present[number] = connection
            else:
                connection.close()
        absent = set(range(1, num_processes)) - set(present)
        missing = ", ".join(map(str, sorted(absent)))
        for connection in present.values():
            with connection:
                connection.sendall(missing.encode() or _GO)
    return missing


def _answer(
    host: str, port: int, num_processes: int, process_id: int, deadline: float
) -> str:
    """Reports to process 0; returns who is missing, 0 itself if it never answers."""
    del num_processes
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=1) as connection:
                connection.sendall(process_id.to_bytes(4, "big"))
                # Process 0 waits for the others first, and then some.
                connection.settimeout(max(deadline - time.monotonic(), 0) + 10)
                answer = connection.recv(4096)
                return "" if answer == _GO else answer.decode() or "0"
        except OSError:
            time.sleep(0.1)
    return "0"
