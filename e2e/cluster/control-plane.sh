#!/usr/bin/env bash
# control-plane.sh: etcd, API server, controller manager and scheduler, all in the cluster's network
# so that the API server's proxy and webhooks reach pods. Returns once service accounts are made.
set -euo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"
pki=$state/pki
install -d -m 700 "$state/etcd"
client=http://127.0.0.1:12379
peer=http://127.0.0.1:12380

etcd=(
  "$root/etcd/etcd" --name=e2e "--data-dir=$state/etcd"
  "--listen-client-urls=$client" "--advertise-client-urls=$client"
  "--listen-peer-urls=$peer" "--initial-advertise-peer-urls=$peer" "--initial-cluster=e2e=$peer"
  --unsafe-no-fsync --log-level=warn
)
api_server=(
  kube-apiserver "--etcd-servers=$client" --bind-address=0.0.0.0
  "--advertise-address=$node_ip" "--secure-port=$api_port"
  "--service-cluster-ip-range=$service_cidr" --allow-privileged=true
  --authorization-mode=Node,RBAC "--client-ca-file=$pki/ca.crt"
  "--tls-cert-file=$pki/apiserver.crt" "--tls-private-key-file=$pki/apiserver.key"
  "--kubelet-client-certificate=$pki/apiserver-kubelet.crt"
  "--kubelet-client-key=$pki/apiserver-kubelet.key"
  "--kubelet-certificate-authority=$pki/ca.crt"
  --kubelet-preferred-address-types=InternalIP
  --service-account-issuer=https://kubernetes.default.svc.cluster.local
  "--service-account-key-file=$pki/accounts.pub"
  "--service-account-signing-key-file=$pki/accounts.key"
  "--requestheader-client-ca-file=$pki/front-proxy-ca.crt"
  --requestheader-allowed-names=front-proxy
  --requestheader-username-headers=X-Remote-User
  --requestheader-group-headers=X-Remote-Group
  --requestheader-extra-headers-prefix=X-Remote-Extra-
  "--proxy-client-cert-file=$pki/front-proxy.crt"
  "--proxy-client-key-file=$pki/front-proxy.key"
)
logins() {
  printf -- '--%s=%s\n' kubeconfig "$1" authentication-kubeconfig "$1" authorization-kubeconfig "$1"
}
mapfile -t login < <(logins "$pki/controller-manager.kubeconfig")
controller_manager=(
  kube-controller-manager "${login[@]}" --leader-elect=false --bind-address=127.0.0.1
  --use-service-account-credentials=true "--root-ca-file=$pki/ca.crt"
  "--service-account-private-key-file=$pki/accounts.key"
  "--cluster-signing-cert-file=$pki/ca.crt" "--cluster-signing-key-file=$pki/ca.key"
  "--flex-volume-plugin-dir=$state/volume-plugins" --allocate-node-cidrs=true
  "--cluster-cidr=$pod_cidr" "--service-cluster-ip-range=$service_cidr"
)
mapfile -t login < <(logins "$pki/scheduler.kubeconfig")
scheduler=(kube-scheduler "${login[@]}" --leader-elect=false --bind-address=127.0.0.1)

start etcd "${etcd[@]}"
start apiserver "${api_server[@]}"
await 120 "the API server is ready (log: $state/log/apiserver.log)" \
  kubectl_admin get --raw /readyz
# The controller manager gives up when the API server is slow to come; so it comes second.
start controller-manager "${controller_manager[@]}"
start scheduler "${scheduler[@]}"
await 60 "the controller manager works (log: $state/log/controller-manager.log)" \
  kubectl_admin get serviceaccount default
