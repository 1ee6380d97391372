#!/bin/busybox sh
# First process of the guest: modules, the machine's root file system read-only under a tmpfs, then
# command.sh there.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
say() { echo "<3>guest: $*" > /dev/kmsg; }
die() { echo "<3>guest: $*" > /dev/kmsg; $b poweroff -f; }
say "loading modules"
while read -r m; do $b insmod "/modules/$m" || say "cannot load $m"; done < /modules/order
. /job/settings

p9=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p machine /lower -o "ro,$p9,cache=loose" || die "cannot mount the machine's root"
$b mount -t tmpfs -o size=80% tmpfs /rw
$b mkdir /rw/upper /rw/work
layers=lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work,xino=off
$b mount -t overlay overlay /root -o "$layers" || die "cannot mount the overlay"
for d in dev proc sys; do $b mkdir -p "/root/$d"; $b mount --move "/$d" "/root/$d"; done
$b mkdir -p /root/run /root/dev/shm /root/dev/pts
$b mount -t tmpfs tmpfs /root/run
$b mount -t tmpfs -o mode=1777,size=75% tmpfs /root/dev/shm
$b mount -t devpts devpts /root/dev/pts
$b ln -s /proc/self/fd /root/dev/fd
for n in 0,stdin 1,stdout 2,stderr; do $b ln -s "fd/${n%,*}" "/root/dev/${n#*,}"; done
# What is written there reaches the machine; all else ends with the guest.
i=0
while read -r d; do
    $b mkdir -p "/root$d"
    $b mount -t 9p "share$i" "/root$d" -o "$p9,cache=mmap" || die "cannot mount $d"
    i=$((i + 1))
done < /job/shares
$b mkdir -p /root/run/guest/tmp
$b cp $b /job/* /command.sh /root/run/guest/
exec $b switch_root /root /run/guest/busybox sh /run/guest/command.sh
