#!/bin/sh
# Train on several machines over ssh, from one of them or from another machine:
#
#     HOSTS=node1,node2 launch/hosts.sh                          # the configuration below
#     HOSTS=node1,node2 launch/hosts.sh --optim.lr 3e-4          # change one setting
#     HOSTS=hosts.txt launch/hosts.sh                            # a file with one host per line
#     DRY_RUN=1 HOSTS=node1,node2 launch/hosts.sh                # only print the commands
#
# ssh must reach the hosts without a password. They need this folder, the Python environment and the
# run's folder at the same paths, for example on a shared file system.
#
# Change for your own job: CONFIG; PYTHON, to use another environment; SSH, for its options.
set -eu

repository=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
CONFIG=${CONFIG:-$repository/configs/quickstart.yaml}
PYTHON=${PYTHON:-python3}

# Also works from a source tree that is not installed.
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m distmp launch ${DRY_RUN:+--dry-run} --ssh "${SSH:-ssh}" \
    --hosts "${HOSTS:?set the machines: HOSTS=node1,node2}" -- --config "$CONFIG" "$@"
