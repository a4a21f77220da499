#!/bin/bash
# Makes an authority, once, and a certificate for each host: certificates.sh FOLDER HOST[,HOST...] [HOST ...]
# HOST is what daemons are told to listen on: a name or a number; those with commas between them share a certificate, which is
# called after the first. Where there is an authority of your own, use that instead.
# They say what each may be used for: Python takes no others for etcd's, from 3.13 on.
set -euo pipefail
umask 077
folder=${1:?certificates.sh FOLDER HOST[,HOST...] [HOST ...]}
shift
mkdir -p "$folder"
cd "$folder"
new_key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
if [[ ! -e ca.key ]]; then
    openssl req -x509 "${new_key[@]}" -keyout ca.key -out ca.pem -days 3650 -subj "/CN=reft $(date +%F)" \
        -addext keyUsage=critical,keyCertSign,cRLSign
fi
for hosts in "$@"; do
    host=${hosts%%,*}
    names=()
    for name in ${hosts//,/ }; do
        kind=DNS
        [[ $name =~ ^[0-9.]+$|: ]] && kind=IP
        names+=("$kind:$name")
    done
    openssl req "${new_key[@]}" -keyout "$host.key" -out "$host.csr" -subj "/CN=$host"
    openssl x509 -req -in "$host.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -out "$host.pem" \
        -extfile <(IFS=,; printf '%s\n' "subjectAltName=${names[*]}" basicConstraints=CA:FALSE keyUsage=critical,digitalSignature \
            extendedKeyUsage=serverAuth,clientAuth subjectKeyIdentifier=hash authorityKeyIdentifier=keyid)
    rm "$host.csr"
done
