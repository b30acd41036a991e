#!/bin/sh
# Train on several machines over ssh, started on one of them or on a machine beside them:
#
#     HOSTS=node1,node2 launch/hosts.sh                          # the configuration below
#     HOSTS=node1,node2 launch/hosts.sh --optim.lr 3e-4          # one setting changed
#     HOSTS=hosts.txt launch/hosts.sh                            # one host on each line of a file
#     DRY_RUN=1 HOSTS=node1,node2 launch/hosts.sh                # only say what would be run
#
# ssh has to reach the hosts without asking for a password. They need this folder, the environment
# and the run's folder at the same paths, as on a shared file system.
#
# Change for your own job: CONFIG; PYTHON, to use another environment; SSH, for its options.
set -eu

repository=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
CONFIG=${CONFIG:-$repository/configs/quickstart.yaml}
PYTHON=${PYTHON:-python3}

# Works from a source tree that has not been installed, too.
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m distmp launch ${DRY_RUN:+--dry-run} --ssh "${SSH:-ssh}" \
    --hosts "${HOSTS:?names the machines: HOSTS=node1,node2}" -- --config "$CONFIG" "$@"
