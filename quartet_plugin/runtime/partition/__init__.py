"""Tables of a tensor partition, executed by processes over point-to-point messages (torch alone)."""
