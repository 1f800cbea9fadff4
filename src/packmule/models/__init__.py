"""The decoder family as task bodies: forward, backward, decoding. No state, no scheduling.

Importing this package loads no torch; its modules do.
"""
