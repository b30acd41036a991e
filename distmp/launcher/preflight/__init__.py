"""Preflight: whether all ranks are alike, reach each other and are equally fast, before they train.

Ranks first compare who they are through the store that the launcher keeps; then they meet as for
training; then they multiply matrices and exchange data, so that slow ones can be named. A watchdog
on every rank ends the job when time is up and names the ranks that did not get as far as the rest.

    torchrun ... -m distmp.commands.preflight --config FILE      # nothing but this
"""
