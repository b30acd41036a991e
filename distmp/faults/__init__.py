"""What goes wrong in a run: hangs, failing ranks, memory that runs out, and how a run goes on."""
