"""Durable state: slots, HEAD, commit, verify, snapshots. Does not decide when. No torch.

Import the submodules directly: `layout`, `head`, `reader`, `store`, `snapshots`, `verify`,
`lock`. The files are described in docs/formats.md.
"""
