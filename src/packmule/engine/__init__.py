"""Running graphs on a real machine: executor, runtime, task bodies."""
