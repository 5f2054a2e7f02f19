#!/usr/bin/env bash
# certs.sh: throw-away authorities, certificates and kubeconfigs in $state/pki, for a few days.
set -euo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"
umask 077
mkdir -p "$state/pki"
cd "$state/pki"
kubernetes_ip=${service_cidr%.*}.1

new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"; }

authority() {
  new_key "$1"
  openssl req -x509 -new -key "$1.key" -subj "/CN=$1" -days 7 -out "$1.crt" \
    -addext basicConstraints=critical,CA:TRUE \
    -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature
}

# certificate NAME AUTHORITY SUBJECT USAGE [ALTERNATIVE NAMES]
certificate() {
  new_key "$1"
  {
    echo "keyUsage=critical,digitalSignature"
    echo "extendedKeyUsage=$4"
    [ -z "${5:-}" ] || echo "subjectAltName=$5"
  } >"$1.ext"
  openssl req -new -key "$1.key" -subj "$3" -out "$1.csr"
  openssl x509 -req -in "$1.csr" -CA "$2.crt" -CAkey "$2.key" -CAcreateserial -days 7 \
    -extfile "$1.ext" -out "$1.crt" 2>/dev/null
  rm "$1.ext" "$1.csr"
}

# login NAME SUBJECT: a client certificate inside a kubeconfig
login() {
  certificate "$1" ca "$2" clientAuth
  cat >"$1.kubeconfig" <<YAML
apiVersion: v1
kind: Config
clusters:
  - name: e2e
    cluster:
      server: https://$node_ip:$api_port
      certificate-authority-data: $(base64 -w0 ca.crt)
users:
  - name: $1
    user:
      client-certificate-data: $(base64 -w0 "$1.crt")
      client-key-data: $(base64 -w0 "$1.key")
contexts:
  - name: e2e
    context: {cluster: e2e, user: $1}
current-context: e2e
YAML
}

authority ca
authority front-proxy-ca
names=DNS:localhost
for suffix in "" .default .default.svc .default.svc.cluster.local; do
  names+=,DNS:kubernetes$suffix
done
certificate apiserver ca /CN=kube-apiserver serverAuth \
  "$names,IP:$node_ip,IP:127.0.0.1,IP:$kubernetes_ip"
certificate kubelet-serving ca "/O=system:nodes/CN=system:node:$node_name" serverAuth \
  "IP:$node_ip,DNS:$node_name"
certificate apiserver-kubelet ca /O=system:masters/CN=apiserver-kubelet clientAuth
certificate front-proxy front-proxy-ca /CN=front-proxy clientAuth
login admin /O=system:masters/CN=admin
login controller-manager /CN=system:kube-controller-manager
login scheduler /CN=system:kube-scheduler
login proxy /CN=system:kube-proxy
login kubelet "/O=system:nodes/CN=system:node:$node_name"
openssl genrsa -out accounts.key 2048 2>/dev/null
openssl rsa -in accounts.key -pubout -out accounts.pub 2>/dev/null
