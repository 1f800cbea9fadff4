"""Update rules as pure functions of one tensor, and learning-rate schedules. No loops."""
