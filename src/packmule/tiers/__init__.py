"""Places tensors live: the disk every file operation goes through. No torch at import."""
