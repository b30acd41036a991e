"""Whether this machine is fit to train: facts are gathered first, then judged one by one."""
