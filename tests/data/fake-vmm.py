#!/usr/bin/env python3
"""Answers the API of Firecracker or of Cloud Hypervisor, QMP, or the commands of crosvm or lkvm, by the name it is called by, as their
documents have it. Its guest is a recorded log of the image: it stands where a pass has begun until it has been moved or resumed, and then ends.

FAKE_LOG is the log, FAKE_COPY that of the second machine of QEMU, FAKE_REQUESTS a file that gets each request, FAKE_ANSWER what is answered instead of an answer (`endless`: byte by byte, for ever), and
FAKE_VERSION the version. FAKE_CAPABILITIES is what QMP does when a migration's capabilities are asked for: `error`, `close`, or, with `again`, an error from the
second round on. With FAKE_MOVED the guest is over as
soon as it has been moved (`over`), or an older one (`back`). The machine whose console has FAKE_SILENT in its name ends without
printing anything. With FAKE_BOOTS the guest ends as soon as it has started."""
import json
import os
import socket
import sys
import time

NAME = os.path.basename(sys.argv[0])
ARGUMENTS = sys.argv[1:]
HEAD, TAIL = open(os.environ["FAKE_LOG"], newline="").read().split("1..", 1)
PAGE = 4096


def option(name):
    return ARGUMENTS[ARGUMENTS.index(name) + 1] if name in ARGUMENTS else None


def progress(number):
    return f"# pass {number} of 8 phase=0 accesses=0 faults=0\r\n"


class Guest:
    def __init__(self):
        self.saved = False
        self.ends = False
        # What comes after the answer.
        self.then = None
        serial = option("--serial") or option("-serial")
        # crosvm: type=file,path=FILE,...
        path = serial.removeprefix("type=file,path=").removeprefix("file=").removeprefix("file:").split(",")[0] if serial else None
        self.is_silent = path and os.environ.get("FAKE_SILENT", "no machine") in path
        self.console = open(path, "w", newline="") if path and not self.is_silent else sys.stdout

    def prints(self, text):
        self.console.write(text)
        self.console.flush()

    def starts(self):
        self.prints(HEAD + progress(2))
        if "FAKE_BOOTS" in os.environ:
            self.goes_on()

    def goes_on(self):
        if self.is_silent:
            print("no such snapshot", file=sys.stderr)
            self.ends = True
        elif self.saved:
            # For another snapshot.
            self.saved = False
            self.prints(progress(5))
        else:
            # Since it has been moved, it has run for a pass; or it has gone back, or was over at once.
            if os.environ.get("FAKE_MOVED") != "over":
                self.prints(progress(1 if os.environ.get("FAKE_MOVED") == "back" else 6))
            # Firecracker logs to its standard output, in the middle of the guest's lines, unless it is told where.
            logs = NAME == "firecracker" and not option("--log-path")
            self.prints("1.." + (TAIL.replace("ok 5 ", "ok [main] The API server received a request. 5 ") if logs else TAIL))
            self.ends = True


def qemu(guest, stream):
    """A connection to QMP. A machine that has moved stands still until QEMU is ended."""
    is_copy = bool(option("-incoming"))
    stream.write(b'{"QMP": {}}\r\n')
    if not is_copy:
        guest.starts()
    for line in stream:
        command = json.loads(line)["execute"]
        record(command)
        answer = {"return": {}}
        asked = os.environ.get("FAKE_CAPABILITIES")
        if command == "migrate-set-capabilities" and asked:
            rounds = open(os.environ["FAKE_REQUESTS"]).read().count("migrate-start-postcopy")
            if asked == "close":
                sys.exit(1)
            if asked == "error" or rounds > 0:
                answer = {"error": {"desc": "no userfaultfd"}}
        if command == "query-migrate":
            answer = {"return": {"status": "completed"}}
        if command == "query-status":
            answer = {"return": {"status": "postmigrate"}}
        stream.write(json.dumps(answer).encode() + b"\r\n")
        stream.flush()
        if command == "migrate-incoming":
            guest.prints("# fault" + open(os.environ["FAKE_COPY"], newline="").read().split("# fault", 1)[1])
            return


def firecracker(guest, request, body):
    if request in ("PUT /machine-config", "PUT /boot-source", "PUT /drives/disk"):
        return ""
    if request == "PUT /actions" and body == {"action_type": "InstanceStart"}:
        guest.starts()
        return ""
    if request == "PATCH /vm":
        if body["state"] == "Resumed":
            guest.goes_on()
        return ""
    if request == "PUT /snapshot/create":
        guest.saved = True
        open(body["snapshot_path"], "w").close()
        with open(body["mem_file_path"], "wb") as memory:
            if body["snapshot_type"] == "Full":
                memory.write(b"A" * (4 * PAGE))
            else:
                # What has changed since: the third page. The rest is a hole.
                memory.truncate(4 * PAGE)
                memory.seek(2 * PAGE)
                memory.write(b"B" * PAGE)
        return ""
    if request == "PUT /snapshot/load" and body["resume_vm"]:
        with open(body["mem_backend"]["backend_path"], "rb") as memory:
            pages = memory.read()[::PAGE].decode()
        guest.goes_on()
        return pages
    return None


def cloud_hypervisor(guest, request, body):
    action = request.removeprefix("PUT /api/v1/vm.")
    if action == "pause":
        return ""
    if action == "resume":
        guest.goes_on()
        return ""
    if action == "snapshot":
        guest.saved = True
        path = body["destination_url"].removeprefix("file://") + "/memory-ranges"
        open(path, "w").close()
        return ""
    if action == "restore":
        if not os.path.exists(body["source_url"].removeprefix("file://") + "/memory-ranges"):
            return None
        # The console is the file that the first one has named.
        guest.console = open("first.log", "w", newline="")
        return ""
    if action == "send-migration":
        # It answers before it sends anything. The guest goes on until then.
        guest.then = lambda: send(guest, body["destination_url"].removeprefix("unix:"))
        return ""
    if action == "receive-migration":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(body["receiver_url"].removeprefix("unix:"))
        listener.listen()
        stream = listener.accept()[0]
        while stream.recv(4096):
            pass
        stream.close()
        guest.console = open("first.log", "w", newline="")
        guest.goes_on()
        return ""
    return None


def send(guest, path):
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(path)
    guest.prints(progress(3))
    stream.sendall(b"state")
    stream.shutdown(socket.SHUT_WR)
    stream.recv(1)
    guest.ends = True


def record(text):
    with open(os.environ["FAKE_REQUESTS"], "a") as requests:
        requests.write(text + "\n")


def commands():
    """crosvm and lkvm: `run` is the machine, and any other word asks it by its socket."""
    if NAME == "lkvm":
        os.makedirs(os.environ["HOME"] + "/.lkvm", exist_ok=True)
        path = f"{os.environ['HOME']}/.lkvm/{option('--name')}.sock"
    else:
        path = option("--socket") or next(word for word in ARGUMENTS if word.endswith(".sock"))
    if ARGUMENTS[0] != "run":
        asks = socket.socket(socket.AF_UNIX)
        asks.connect(path)
        asks.sendall(json.dumps(ARGUMENTS).encode() + b"\n")
        sys.exit(asks.recv(1) != b"0")
    record(" ".join(ARGUMENTS))
    guest = Guest()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    if "--restore" not in ARGUMENTS:
        guest.starts()
    while not guest.ends:
        stream = listener.accept()[0].makefile("rwb")
        words = json.loads(stream.readline())
        record(" ".join(words))
        if words[0] == "snapshot":
            os.mkdir(words[2])
        stream.write(b"0")
        stream.close()
        if words[0] == "resume":
            guest.goes_on()


def main():
    if ARGUMENTS in (["--version"], ["version"]):
        print(NAME, os.environ.get("FAKE_VERSION", "of a test"))
        return
    if NAME in ("crosvm", "lkvm"):
        commands()
        return
    guest = Guest()
    listener = socket.socket(socket.AF_UNIX)
    if NAME.startswith("qemu"):
        listener.bind(option("-qmp").removeprefix("unix:").split(",")[0])
        listener.listen()
        qemu(guest, listener.accept()[0].makefile("rwb"))
        return
    listener.bind(option("--api-sock") or option("--api-socket"))
    listener.listen()
    if option("--kernel"):
        guest.starts()
    while not guest.ends:
        stream = listener.accept()[0].makefile("rwb")
        words = stream.readline().decode().split()
        if not words:
            # It was looked at whether this listens.
            continue
        length = 0
        while header := stream.readline().strip():
            name, value = header.decode().split(":", 1)
            length = int(value) if name.lower() == "content-length" else length
        body = stream.read(length)
        request = " ".join(words[:2])
        answer = (firecracker if NAME == "firecracker" else cloud_hypervisor)(
            guest, request, json.loads(body) if body else None
        )
        record(f"{request} {body.decode()} {answer}".strip())
        error = b'{"fault_message": "Invalid request."}'
        good = b"HTTP/1.1 204 No Content\r\nServer: a test\r\n\r\n"
        bad = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(error), error)
        said = os.environ.get("FAKE_ANSWER")
        while said == "endless":
            stream.write(b"H")
            stream.flush()
            time.sleep(0.05)
        stream.write(said.encode() if said else bad if answer is None else good)
        stream.flush()
        stream.close()
        if guest.then:
            guest.then()


main()
