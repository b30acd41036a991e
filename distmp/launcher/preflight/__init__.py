"""Preflight: check before training that ranks are consistent, connected and equally fast.

Ranks first compare versions and configurations through the launcher's store. They then create the
process group as for training, multiply matrices and exchange data, to report slow ranks. A watchdog
on every rank ends the job after a time limit and reports which ranks are late.

    torchrun ... -m distmp.commands.preflight --config FILE      # only the preflight
"""
