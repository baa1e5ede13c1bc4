"""Run a command on the stub device."""

import os
import sys

from benchmarks.gpu.stub.build import build, words

command = words(build(), *sys.argv[1:])
os.execvp(command[0], command)
