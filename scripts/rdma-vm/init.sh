#!/bin/sh
# First process of the guest, from the initramfs: modules, then the host's root file system, read-only
# over 9p, under a writable layer that lives in memory. Ends by handing over to guest.sh.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
say() { echo "rdma-vm: $*" >/dev/ttyS0; }
while read -r module; do
  insmod "/modules/$module" || say "cannot load $module"
done </modules/order
options=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "ro,cache=loose,$options" root /lower || { say "no root file system over 9p"; poweroff -f; }
mount -t tmpfs -o size=70% none /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/lower,upperdir=/layer/upper,workdir=/layer/work none /guest
for part in proc sys dev; do mount --move "/$part" "/guest/$part"; done
mkdir -p /guest/dev/pts /guest/dev/shm
mount -t devpts none /guest/dev/pts
mount -t tmpfs none /guest/dev/shm
mount -t tmpfs none /guest/run
mkdir /guest/run/rdma-vm
cp /bin/busybox /guest/run/busybox # to power off with, when 9p is gone
mount -t 9p -o "rw,cache=none,$options" out /guest/run/rdma-vm
exec switch_root /guest /bin/sh /run/rdma-vm/guest.sh
