"""The initial root directory of AgentBench's operating system tasks: the files of Debian and Ubuntu."""

from slipstream.envhub.isolation.file_tree import Tree, file, folder
from slipstream.envhub.name_list import name_list

# The users of the package base-passwd: name, user id, group id, home.
_USERS = [
    entry.split()
    for entry in name_list(
        """
        root 0 0 /root, daemon 1 1 /usr/sbin, bin 2 2 /bin, sys 3 3 /dev, sync 4 65534 /bin, games 5 60 /usr/games,
        man 6 12 /var/cache/man, lp 7 7 /var/spool/lpd, mail 8 8 /var/mail, news 9 9 /var/spool/news,
        uucp 10 10 /var/spool/uucp, proxy 13 13 /bin, www-data 33 33 /var/www, backup 34 34 /var/backups,
        list 38 38 /var/list, irc 39 39 /run/ircd, _apt 42 65534 /nonexistent, nobody 65534 65534 /nonexistent
        """
    )
]
_GROUPS = dict(
    pair.split()
    for pair in name_list(
        """
        root 0, daemon 1, bin 2, sys 3, adm 4, tty 5, disk 6, lp 7, mail 8, news 9, uucp 10, man 12, proxy 13,
        kmem 15, dialout 20, fax 21, voice 22, cdrom 24, floppy 25, tape 26, sudo 27, audio 29, dip 30,
        www-data 33, backup 34, operator 37, list 38, irc 39, src 40, shadow 42, utmp 43, video 44, sasl 45, plugdev 46,
        staff 50, games 60, users 100, nogroup 65534
        """
    )
)
_FOLDERS = name_list(
    """
    boot, etc, etc/skel, home, media, mnt, opt, run, run/lock, srv, sys, usr, usr/local, usr/local/bin,
    usr/local/etc, usr/local/games, usr/local/include, usr/local/lib, usr/local/sbin, usr/local/share,
    usr/local/src, var, var/backups, var/cache, var/lib, var/local, var/log, var/mail, var/opt, var/spool,
    var/tmp
    """
)


def root_tree() -> Tree:
    tree: Tree = {path: folder() for path in _FOLDERS}
    tree |= {"root": folder(0o700), "tmp": folder(0o777), "root/.bashrc": file(""), "etc/hostname": file("sandbox\n")}
    tree["root/.profile"] = file('if [ "$BASH" ]; then . ~/.bashrc; fi\n')
    tree["etc/hosts"] = file("127.0.0.1\tlocalhost\n127.0.1.1\tsandbox\n")
    tree["etc/passwd"] = file(
        "".join(f"{name}:x:{user}:{group}:{name}:{home}:{_shell(name)}\n" for name, user, group, home in _USERS)
    )
    tree["etc/group"] = file("".join(f"{name}:x:{group}:\n" for name, group in _GROUPS.items()))
    tree["etc/shadow"] = file("".join(f"{name}:*:19000:0:99999:7:::\n" for name, *_ in _USERS), 0o640)
    tree["etc/gshadow"] = file("".join(f"{name}:*::\n" for name in _GROUPS), 0o640)
    return tree


def _shell(name: str) -> str:
    return {"root": "/bin/bash", "sync": "/bin/sync"}.get(name, "/usr/sbin/nologin")
