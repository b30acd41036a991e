"""Preflight: check before training that ranks are consistent, connected and equally fast.

Ranks first compare versions, settings, code and data through the launcher's store. They then
multiply matrices, create the process group as for training, and exchange data, to report slow
ranks. A watchdog on every rank ends the job if no rank makes progress, and reports late ranks.

    torchrun ... -m distmp.commands.preflight --config FILE      # only the preflight
"""
