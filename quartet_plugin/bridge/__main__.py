"""`python -m quartet_plugin.bridge [-m MODULE | SCRIPT] ARGS...`: see `entry`."""

from quartet_plugin.bridge.entry import main

main()
