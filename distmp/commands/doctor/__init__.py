"""Whether this machine is fit to train: machine are gathered first, then judged one by one."""
