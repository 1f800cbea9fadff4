"""Running a job: the parent that plans, starts and watches; the child that trains."""
