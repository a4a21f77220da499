#!/bin/bash
# Makes an authority, once, and the certificates of a user's daemons and agents: certificates.sh FOLDER USER NODE [NODE ...]
#
#   FOLDER/ca.pem  ca.key              the authority; ca.key belongs on no node
#   FOLDER/USER/nodes/NODE.pem  .key   of the daemon that serves USER on NODE
#   FOLDER/USER/agents/NODE.pem .key   of the agents of USER on NODE: whoever has it calls daemons, and can't serve as one
#
# USER is whose daemons they are: a daemon serves its own user only. NODE is the daemon's --node, by default the host's name.
# No addresses stand in them, so a node may get others. With the same arguments the certificates are renewed, with new keys.
# An authority of your own gives these names: URI reft://user/USER to all, to a daemon's also URI reft://node/NODE and DNS
# USER.reft.internal, to an agent's URI reft://agent/NODE, without serverAuth. It gives USER's names, also as *, to nobody else.
set -euo pipefail
export LC_ALL=C
umask 077
usage="certificates.sh FOLDER USER NODE [NODE ...]"
folder=${1:?$usage} user=${2:?$usage}
shift 2
: "${1:?$usage}"
if [[ ! $user =~ ^[a-z0-9_][a-z0-9._-]{0,62}$ ]]; then
    echo "USER is $user. Allowed are at most 63 of a-z 0-9 . _ - with a letter, a digit or _ first." >&2
    exit 2
fi
for node in "$@"; do
    if [[ ! $node =~ ^[A-Za-z0-9_][A-Za-z0-9._-]{0,252}$ ]]; then
        echo "NODE is $node. Allowed are at most 253 of A-Z a-z 0-9 . _ - with a letter, a digit or _ first." >&2
        exit 2
    fi
done
mkdir -p "$folder/$user/nodes" "$folder/$user/agents"
cd "$folder"
new_key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
if [[ ! -e ca.key ]]; then
    openssl req -x509 "${new_key[@]}" -keyout ca.key -out ca.pem -days 3650 -subj "/CN=reft $(date +%F)" \
        -addext keyUsage=critical,keyCertSign,cRLSign
fi

make_certificate() { # FILE PURPOSES NAMES
    # Under other names first: a daemon that reads the files meanwhile finds a certificate and a key that fit together, or
    # reads them again a minute later.
    openssl req "${new_key[@]}" -keyout "$1.key.new" -out "$1.csr" -subj "/CN=reft"
    # Python takes no certificates without purposes and identifiers, from 3.13 on.
    openssl x509 -req -in "$1.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -out "$1.pem.new" -extfile <(
        printf '%s\n' "subjectAltName=$3" "extendedKeyUsage=$2" basicConstraints=CA:FALSE keyUsage=critical,digitalSignature \
            subjectKeyIdentifier=hash authorityKeyIdentifier=keyid
    )
    mv "$1.key.new" "$1.key"
    mv "$1.pem.new" "$1.pem"
    rm "$1.csr"
}

for node in "$@"; do
    make_certificate "$user/nodes/$node" serverAuth,clientAuth \
        "URI:reft://user/$user,URI:reft://node/$node,DNS:$user.reft.internal"
    make_certificate "$user/agents/$node" clientAuth "URI:reft://user/$user,URI:reft://agent/$node"
done
