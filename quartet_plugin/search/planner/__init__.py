"""Planning without running: every legal layout of a job, ranked by predicted time under the memory limit."""
