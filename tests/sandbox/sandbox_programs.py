"""A sandbox's program for tests: it does what a request says."""

import os
import signal
import sys
import time

kept = []


def prepare(greeting):
    if greeting == "fail":
        raise ImportError("it does not load")
    if greeting == "exit":
        sys.exit("it does not load")
    if greeting == "slow":
        time.sleep(0.4)
    if greeting == "chatter":
        sys.stderr.write("x" * 500_000)

    def answer(request):
        kind, value = request
        if kind == "say":
            return [greeting, value]
        if kind == "loop":
            while True:
                pass
        if kind == "sleep":
            time.sleep(value)
        if kind == "allocate":
            return len(bytearray(value))
        if kind == "keep":
            kept.append(bytearray(value))
            return value
        if kind == "recurse":
            return recursed(value)
        if kind == "long":
            return "x" * value
        if kind == "fork":
            return os.getpid()
        if kind == "environment":
            return dict(os.environ)
        if kind == "signal":
            os.kill(os.getpid(), value)
            time.sleep(1)
        if kind == "raise":
            raise KeyError(value)
        return None

    return answer


def recursed(depth):
    return 0 if depth == 0 else 1 + sorted([depth], key=lambda one: recursed(one - 1))[0]


assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
