# Second process of the guest: network, soft-RoCE, the command; its exit status goes to the port
# "status".
b=/run/guest/busybox
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
say() { echo "<3>guest: $*" > /dev/kmsg; }
. /run/guest/settings
for p in /sys/class/virtio-ports/*; do
    $b ln -s "/dev/${p##*/}" "/run/guest/port.$($b cat "$p/name")"
done
# Whatever happens to the machine's side, the guest does not outlive its time.
($b sleep "$LIMIT_S"; say "out of time"; $b poweroff -f) < /dev/null > /dev/null 2>&1 &

$b hostname "$NAME"
{ echo "127.0.0.1 localhost"; echo "$ADDRESS $NAME"; $b cat /run/guest/hosts; } > /etc/hosts
$b ip link set lo up
if [ "$NETWORK" = pair ]; then
    device=eth0
    $b ip link set eth0 mtu 1500 up
else
    device=rdma0
    $b ip link add rdma0 type dummy
    $b ip link set rdma0 mtu 9000 address 02:00:00:77:00:01 up
fi
$b ip addr add "$ADDRESS/24" dev $device
rdma link add rxe0 type rxe netdev $device || say "cannot add the soft-RoCE device"
ulimit -l unlimited
ulimit -n 65536
say "command"
if [ "$INPUT" = 1 ]; then exec 3< /run/guest/port.in; else exec 3< /dev/null; fi
/bin/bash /run/guest/job.sh <&3 > /run/guest/port.out 2> /run/guest/port.err
echo $? > /run/guest/port.status
say "done"
$b poweroff -f
