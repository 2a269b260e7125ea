"""What every training process does under either framework: its rank, its files, its measuring, its end.

Imported inside the processes that a launcher starts. Importing it patches nothing and imports no framework.
"""
