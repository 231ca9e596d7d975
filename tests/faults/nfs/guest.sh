#!/bin/sh
# The virtual machine from the inside: an NFS server, and nodes that are clients of it, each in network,
# mount and UTS namespaces of its own, so that the kernel keeps a client with caches of its own for each.
#
#   guest.sh                        the machine, as its first process, by the variables that `nox -s nfs` sets
#   guest.sh node NODE VERSIONS     a node's namespaces
set -eu
here=${0%/*}
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$here/../../../src:$here/../..:$here/../../../ci"
export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 LOCAL_SIZE=1 OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
server=10.9.0.100

start_rpc() { # what NFS 3 needs for its locks, on the server and on each client
    mount -t tmpfs tmpfs /var/lib/nfs
    mkdir -p /var/lib/nfs/sm /var/lib/nfs/sm.bak /var/lib/nfs/v4recovery /run/rpcbind
    touch /var/lib/nfs/state /var/lib/nfs/etab /var/lib/nfs/rmtab
    chown -R statd /var/lib/nfs/sm /var/lib/nfs/sm.bak /var/lib/nfs/state
    rpcbind
    rpc.statd --no-notify
}

if [ "${1-}" = node ]; then
    hostname "node$2"
    mount -t tmpfs tmpfs /run
    start_rpc
    for version in $3; do
        mkdir -p "/mnt/nfs/$version"
        case $version in 3) folder=/mnt/disk ;; *) folder=/ ;; esac
        mount -t nfs -o "vers=$version" "$server:$folder" "/mnt/nfs/$version"
    done
    touch "/mnt/ready$2"
    exec sleep infinity
fi

trap 'echo "The machine ends."; echo o > /proc/sysrq-trigger; sleep 60' EXIT
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mkdir -p /dev/shm
for folder in /dev/shm /run /mnt; do mount -t tmpfs tmpfs "$folder"; done
mkdir /mnt/disk /mnt/nfs
mount --bind /usr/lib/uml/modules /lib/modules
modprobe -a ext4 nfs nfsv3 nfsv4 nfsd bridge veth
ip link set lo up

mkfs.ext4 -q /dev/ubda
mount /dev/ubda /mnt/disk
start_rpc
mount -t nfsd nfsd /proc/fs/nfsd
# For NFS 4 it is the root: folders above it cannot be exported, they are of this machine's host.
exportfs -o fsid=0,rw,sync,no_root_squash,no_subtree_check "10.9.0.0/24:/mnt/disk"
rpc.nfsd 8
rpc.mountd
# No client has locks from before to claim. Linux 7 does not wait for any here, and this is an error there.
echo Y > /proc/fs/nfsd/v4_end_grace 2> /dev/null || true

ip link add bridge type bridge
ip addr add "$server/24" dev bridge
ip link set bridge up
node=0
for number in $NFS_NODES; do
    while [ "$node" -lt "$number" ]; do
        ip netns add "$node"
        ip link add "to$node" type veth peer name eth0 netns "$node"
        ip link set "to$node" master bridge up
        ip -n "$node" addr add "10.9.0.$((node + 1))/24" dev eth0
        ip -n "$node" link set eth0 up
        ip -n "$node" link set lo up
        ip netns exec "$node" unshare --mount --uts sh "$0" node "$node" "$NFS_VERSIONS" &
        echo $! > "/mnt/node$node"
        until [ -e "/mnt/ready$node" ]; do kill -0 $! && sleep 0.2; done
        node=$((node + 1))
    done
done
"$NFS_PYTHON" "$here/node.py"
