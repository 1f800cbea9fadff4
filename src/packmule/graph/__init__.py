"""Steps of work as graphs of tasks over resources and buffers. Pure: no torch, no I/O, no clock."""
