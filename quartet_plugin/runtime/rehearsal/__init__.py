"""Rehearses a schedule: the runtime's own executor and transport in real processes, compute that sleeps.

A plan for many devices can so be tried on a laptop: it hangs here where it would hang there, and the time of
a step shows how far the simulator can be trusted.
"""
