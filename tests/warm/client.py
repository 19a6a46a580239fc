"""Asks the server for a fork in this process's place: `client.py ADDRESS ARGUMENTS`, run by a bare Python.

The request carries the arguments, the environment, the working directory and the three streams. Then signals go to the fork, and
its end is this process's end, by the same status or signal. If this process is killed the server kills the fork.
"""

import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)


def main(address: str, arguments: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    server.connect(address)
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    fork = int(server.recv(16))

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its status is under way
            os.kill(fork, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = int(server.recv(16) or 1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


main(sys.argv[1], sys.argv[2:])
