# Second stage of the guest, as root on what looks like the host's file system: the network, the
# Soft-RoCE device rxe0, then the command. Variables come from guest.env, written by vm.py.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb
export OUT=/run/rdma-vm IN_RDMA_VM=1 LC_ALL=C.UTF-8
. "$OUT/guest.env"
exec </dev/null
ip link set lo up
if [ "$VM_NETWORK" = pair ]; then
  link=eth0
else
  link=dummy0 # the module makes it by itself
  ip link show $link >/dev/null 2>&1 || ip link add $link type dummy
fi
ip link set $link mtu "$VM_MTU" up
ip addr add "$VM_ADDRESS/24" dev $link
rdma link add rxe0 type rxe netdev $link
export RDMA_VM_ADDRESS="$VM_ADDRESS" RDMA_VM_LINK=$link
# Files that the host laid ready in one stream: thousands of small reads over 9p are slow.
for archive in $VM_PRELOADS; do
  tar -xPf "$OUT/$archive"
done
echo "rdma-vm: the command starts $(cut -d' ' -f1 /proc/uptime) s after the kernel" >/dev/ttyS0
stty -F /dev/hvc0 raw -echo 2>/dev/null
cd "$VM_FOLDER" 2>/dev/null || cd /
/bin/bash "$OUT/command.sh" >/dev/hvc0 2>&1
echo $? >"$OUT/status"
dmesg >"$OUT/dmesg" 2>/dev/null
sync
exec /run/busybox poweroff -f
