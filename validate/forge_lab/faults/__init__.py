"""Faults: what they are (data), and the proxy for those of the protocol. Those inside the server are in `inside/faults`."""
