"""Detection and reporting of hanging and lost ranks."""
