"""Program of the network tests: moves bytes between two hosts over plain sockets and prints what it measured.

`traffic.py serve NUM_BYTES` on one host, `traffic.py send ADDRESS NUM_BYTES SECONDS` on the other; with
`both` after them each side sends and receives at the same time.
"""

import socket
import sys
import threading
import time

PORT = 5000
BLOCK_BYTES = 1 << 18


def _receive(connection: socket.socket, num_bytes: int) -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    while num_bytes > 0:
        got = connection.recv_into(buffer[: min(BLOCK_BYTES, num_bytes)])
        if got == 0:
            raise ConnectionError("the other side left early")
        num_bytes -= got


def _measure(connection: socket.socket, num_bytes: int, sends: bool, receives: bool) -> float:
    """Seconds until all bytes went, or came, after both sides were ready."""
    connection.sendall(b"r")
    _receive(connection, 1)
    start = time.monotonic()
    data = bytes(BLOCK_BYTES)

    def send() -> None:
        for _ in range(num_bytes // BLOCK_BYTES):
            connection.sendall(data)

    sender = threading.Thread(target=send if sends else lambda: None)
    sender.start()
    if receives:
        _receive(connection, num_bytes // BLOCK_BYTES * BLOCK_BYTES)
    sender.join()
    return time.monotonic() - start


def main() -> None:
    role, *rest = sys.argv[1:]
    both = rest[-1] == "both"
    if role == "serve":
        with socket.socket() as listener:
            listener.bind(("", PORT))
            listener.listen(1)
            print("listening", flush=True)
            connection, _ = listener.accept()
        num_bytes = int(rest[0])
        print(_measure(connection, num_bytes, both, True), flush=True)
    else:
        connection = socket.create_connection((rest[0], PORT), timeout=20)
        _measure(connection, int(rest[1]), True, both)


main()
