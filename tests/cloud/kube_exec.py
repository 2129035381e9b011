"""The server's side of `kubectl exec`: the channels of a process over a WebSocket."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pty
import subprocess
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

_PROTOCOL = "v5.channel.k8s.io"
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455
# Channels of the protocol.
_STDIN = 0
_STDOUT = 1
_STDERR = 2
_ERROR = 3
_CLOSE = 255
# Kinds of frame.
_BINARY = 2
_CLOSING = 8
_PING = 9
_PONG = 10


class Call:
    """A call of `kubectl exec`. command: its words. has_terminal: whether it asks for one.

    cut_after: bytes of output after which the connection breaks. flip: index of an output byte that
    arrives damaged. For both, -1 means never.
    """

    def __init__(self, handler: BaseHTTPRequestHandler, query: dict[str, list[str]]) -> None:
        self.command = query["command"]
        self.has_terminal = query.get("tty") == ["true"]
        self.cut_after = -1
        self.flip = -1
        self._handler = handler
        self._sent = 0
        self._lock = threading.Lock()

    def run(self, cwd: Path, env: dict[str, str]) -> None:
        """Run the command as a process, connect its channels, and send its exit code."""
        command = self.command
        ends = (subprocess.PIPE, subprocess.PIPE, subprocess.PIPE)
        if self.has_terminal:
            terminal, end = pty.openpty()
            ends = (end, end, end)
            command = ["setsid", "--ctty", "--wait", *command]
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=ends[0], stdout=ends[1], stderr=ends[2], bufsize=0
        )
        if self.has_terminal:
            os.close(end)
            inputs = terminal
            outputs = {_STDOUT: terminal}
        else:
            assert process.stdin and process.stdout and process.stderr
            inputs = process.stdin.fileno()
            outputs = {_STDOUT: process.stdout.fileno(), _STDERR: process.stderr.fileno()}
        threading.Thread(target=self._receive, args=(process, inputs), daemon=True).start()
        copies = [
            threading.Thread(target=self._send_all, args=(process, *output), daemon=True)
            for output in outputs.items()
        ]
        for thread in copies:
            thread.start()
        for thread in copies:
            thread.join()
        self._send_end(process.wait())

    def _send_all(self, process: subprocess.Popen[bytes], channel: int, descriptor: int) -> None:
        try:
            while data := os.read(descriptor, 1 << 16):
                if channel == _STDOUT:
                    data = self._damage(data)
                self._send(bytes([channel]) + data)
        except OSError:  # the client is gone, or the terminal's other end is closed
            if process.poll() is None and not self.has_terminal:
                process.kill()

    def _damage(self, data: bytes) -> bytes:
        start = self._sent
        self._sent += len(data)
        if 0 <= self.cut_after < self._sent:
            self._handler.connection.shutdown(2)
            raise ConnectionError("cut")
        if start <= self.flip < self._sent:
            at = self.flip - start
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data

    def _send_end(self, code: int) -> None:
        status: dict = {"metadata": {}, "status": "Success"}
        if code:
            status = {
                "metadata": {},
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "message": f"command terminated with non-zero exit code: exit status {code}",
                "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
            }
        try:
            self._send(bytes([_ERROR]) + json.dumps(status).encode())
            self._send((1000).to_bytes(2, "big"), _CLOSING)
        except OSError:
            pass

    def _send(self, payload: bytes, opcode: int = _BINARY) -> None:
        size = len(payload)
        length = bytes([size]) if size < 126 else b"\x7f" + size.to_bytes(8, "big")
        with self._lock:
            self._handler.wfile.write(bytes([0x80 | opcode]) + length + payload)

    def _receive(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        """Write the client's data to the process, until the client leaves."""
        while True:
            frame = self._read_frame()
            if frame is None or frame[0] == _CLOSING:
                if process.poll() is None:
                    process.kill()
                return
            opcode, payload = frame
            if opcode == _PING:
                self._send(payload, _PONG)
            elif payload[:1] == bytes([_STDIN]):
                try:
                    os.write(descriptor, payload[1:])
                except OSError:
                    continue
            elif payload == bytes([_CLOSE, _STDIN]) and process.stdin:
                process.stdin.close()

    def _read_frame(self) -> tuple[int, bytes] | None:
        """Return opcode and payload of the next frame; None if the connection has ended."""
        read = self._handler.rfile.read
        try:
            head = read(2)
            if len(head) < 2:
                return None
            size = head[1] & 0x7F
            if size >= 126:
                size = int.from_bytes(read(2 if size == 126 else 8), "big")
            mask = read(4)
            data = read(size)
        except OSError:
            return None
        pattern = mask * (size // 4 + 1)
        return head[0] & 0xF, bytes(a ^ b for a, b in zip(data, pattern, strict=False))


def accept_call(handler: BaseHTTPRequestHandler, query: dict[str, list[str]]) -> Call:
    """Answer the request of a WebSocket, and return the call that it carries."""
    key = handler.headers["Sec-WebSocket-Key"].encode()
    handler.send_response(101)
    handler.send_header("Upgrade", "websocket")
    handler.send_header("Connection", "Upgrade")
    digest = hashlib.sha1(key + _MAGIC).digest()
    handler.send_header("Sec-WebSocket-Accept", base64.b64encode(digest).decode())
    handler.send_header("Sec-WebSocket-Protocol", _PROTOCOL)
    handler.end_headers()
    return Call(handler, query)
