"""The drop-in entry with `{rank}` in its arguments replaced: every rank is told something else."""

import os
import sys

from quartet_plugin.megatron.entry import main

if __name__ == "__main__":
    sys.argv[1:] = [word.replace("{rank}", os.environ["RANK"]) for word in sys.argv[1:]]
    main()
