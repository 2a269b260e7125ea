"""`python -m quartet_plugin.rank.warm --channel N`: a trial server, started by `launchers.warm`."""

import sys

from quartet_plugin.rank.warm.server import serve

if __name__ == "__main__":
    task = serve(sys.argv[1:])
    # A forked process goes on here, so that nothing of the server is between it and its program.
    if task is not None:
        task()
