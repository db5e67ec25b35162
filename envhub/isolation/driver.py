"""The two scripts of a sandbox. `SETUP` runs before bubblewrap: it makes what bubblewrap cannot make. `DRIVER` is the
first process inside: it unpacks the tree, runs the command and packs the tree.
"""

# It is root of a new user namespace, with namespaces of mounts and of the network. It mounts, below /sys, the folders
# that can be written, because bubblewrap cannot limit the number of their files, each of which takes a kilobyte of the
# kernel's memory. Few connections wait for a socket that listens: `backlog`, or "" if the filter sees to that. The
# network is only a loopback, whose sockets have small buffers; where these cannot be set it stays down. There are no
# huge pages (PR_SET_THP_DISABLE): a process could unmap all of one but a page, and the kernel would keep it.
SETUP = """
import _signal, _socket, ctypes, fcntl, os, sys
backlog, folders, *command = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
def mount(path, options):
    if libc.mount(b"tmpfs", path.encode(), b"tmpfs", 6, options.encode()):
        sys.exit(f"no tmpfs could be mounted: {os.strerror(ctypes.get_errno())}")
mount("/sys", "size=0,nr_inodes=16,mode=755")
for folder in folders.split():
    name, size = folder.split("=")
    os.mkdir(f"/sys/{name}")
    mount(f"/sys/{name}", f"size={size},nr_inodes={int(size) // 2048},mode=755")
def limit(name, value):
    with open(f"/proc/sys/net/{name}", "w") as file:
        file.write(value)
if backlog:
    limit("core/somaxconn", backlog)
try:
    limit("ipv4/tcp_rmem", "4096 65536 65536")
    limit("ipv4/tcp_wmem", "4096 65536 65536")
    fcntl.ioctl(_socket.socket(), 0x8914, b"lo".ljust(16, b"\\0") + (65).to_bytes(2, "little") + bytes(22))  # up
except OSError:
    pass
libc.prctl(41, 1, 0, 0, 0)
for number in _signal.SIGPIPE, _signal.SIGXFSZ:  # Python ignores them
    _signal.signal(number, _signal.SIG_DFL)
os.execvp(command[0], command)
"""

# Both output streams of the command go to the driver's stderr, because its stdout carries the tree. When the command
# has ended, the driver kills all processes that it left, and then reads the tree. The user called root has no
# capabilities, so the driver first changes modes that would keep it from reading the tree.
# The `processes` that run beside the command are sleeps with other names. The driver starts each one when the one
# before it has its name, so that their pids are the same in every run. An ended process leaves its pid unused. A
# process that neither sleeps nor is stopped, or that has a pending signal, is about to end, so the driver checks it
# again. Names and command come by stdin, so a command that kills processes by their arguments cannot hit the driver.
DRIVER = """
lives() {
    while status=$(cat "/proc/$1/status") && [[ $status =~ State:[[:space:]]+([A-Z]) ]]; do
        case ${BASH_REMATCH[1]} in
            Z | X) return 1 ;;
            T) return 0 ;;
            S) [[ $status =~ (SigPnd|ShdPnd):[[:space:]]*0*[1-9a-f] ]] || return 0 ;;
        esac
    done
    return 1
}
umask 022
ulimit -c 0 -q 0 -i 256 -l 64 || exit
ulimit -n "$MAX_OPEN_FILES" -u "$MAX_PROCESSES" -v "$MEMORY_KIB" -t "$CPU_S" -f "$FILE_KIB" || exit
read -r -a processes; read -r -d "" command
tar -x -f - -C "$TREE" || exit
[ -z "$BASE" ] || /usr/bin/python3 -I -S -c "$1" apply "$BASE" "$TREE" || exit
printf +
exec 3>&2 2>/dev/null
beside=()
for name in "${processes[@]}"; do
    if [ "$name" != - ]; then
        (exec -a "$name" sleep infinity </dev/null >/dev/null 3>&-) &
        until read -r comm < "/proc/$!/comm" && [ "$comm" = sleep ]; do :; done
    else
        (exit) & wait $!
    fi
    beside+=($!)
done
timeout --signal=KILL "$WALL_S" /bin/bash --noprofile --norc -c "$command" </dev/null >&3 2>&3 3>&-
rc=$?
for pid in "${beside[@]}"; do lives "$pid" && printf 1 || printf 0; done
kill -9 -1 2>/dev/null
cd "$TREE" && if [ "$TREE" = / ] || [ -n "$BASE" ]; then
    find . -xdev \\( -type d ! -perm -u+rwx -o -type f ! -perm -u+r \\) -exec chmod u+rwX {} \\; 2>/dev/null
else
    chmod -R u+rX . 2>/dev/null
fi
[ -z "$BASE" ] || /usr/bin/python3 -I -S -c "$1" extract "$BASE" . 2>/dev/null || exit "$rc"
tar -c $NOT_OF_THE_TREE --hard-dereference --format=ustar --sort=name \\
    --mtime=@0 --owner=0 --group=0 --numeric-owner -f - . 2>/dev/null
exit "$rc"
"""
