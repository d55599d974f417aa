"""Links with a limited rate and a delay between network namespaces. Needs root, iproute2 and TUN devices."""

import subprocess
import sys

import pytest

from benchmarks.namespaces import Direction, Shape, missing, shaped_network

RATE, DELAY, BYTES = 5e6, 0.03, 1_000_000
RECEIVER = f"""
import socket
listener = socket.create_server(("0.0.0.0", 9))
print("ready", flush=True)
connection = listener.accept()[0]
connection.sendall(connection.recv(1))
left = {BYTES}
while left:
    left -= len(connection.recv(left))
connection.sendall(b"x")
"""
SENDER = f"""
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9))
begun = time.monotonic()
connection.sendall(b"x")
connection.recv(1)
answered = time.monotonic()
connection.sendall(bytes({BYTES}))
connection.recv(1)
print(answered - begun, time.monotonic() - answered)
"""


def test_packets_follow_one_another_at_the_rate_and_arrive_after_the_delay() -> None:
    direction = Direction(Shape(rate=1000, delay=0.5, queue=0.3))
    assert [direction.arrival(100, now) for now in (1.0, 1.0, 2.0)] == pytest.approx([1.6, 1.7, 2.6])
    assert [direction.arrival(400, now) for now in (3.0, 3.05)] == [pytest.approx(3.9), None], "0.35 s wait, more than the queue"


@pytest.mark.processes
def test_a_link_between_namespaces_limits_rate_and_delay() -> None:
    """Times are not bounded from above, because other programs may use the cores."""
    if lacks := missing():
        pytest.skip(f"needs {lacks}")
    with shaped_network(2, [(0, 1)], Shape(RATE, DELAY), "petra-test") as (hosts, _):
        words = [["ip", "netns", "exec", host, sys.executable, "-c"] for host in hosts]
        with subprocess.Popen([*words[1], RECEIVER], stdout=subprocess.PIPE, text=True) as receiver:
            try:
                assert receiver.stdout is not None
                assert receiver.stdout.readline() == "ready\n"
                done = subprocess.run([*words[0], SENDER, "10.97.0.2"], capture_output=True, text=True, timeout=60, check=True)
            finally:
                receiver.kill()
    answer, transfer = map(float, done.stdout.split())
    assert answer >= 2 * DELAY
    assert transfer >= 0.9 * BYTES / RATE + 2 * DELAY
