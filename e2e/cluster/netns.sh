#!/usr/bin/env bash
# netns.sh up|down: one network for the whole cluster. The host reaches Services and pods by two
# routes through it; rules, bridges and veths of kube-proxy and CNI end with the namespace.
set -euo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"
outer=fvl-e2e-host
inner=fvl-e2e-node

case ${1:-} in
  up)
    ip netns add "$namespace"
    ip link add "$outer" type veth peer name "$inner"
    ip link set "$inner" netns "$namespace"
    ip address add "$host_ip/24" dev "$outer"
    ip link set "$outer" up
    in_netns ip link set lo up
    in_netns ip address add "$node_ip/24" dev "$inner"
    in_netns ip link set "$inner" up
    # A Service address needs some route before it is translated; packets end at the host.
    in_netns ip route add default via "$host_ip"
    in_netns sysctl -qw net.ipv4.ip_forward=1
    in_netns sysctl -qw net.bridge.bridge-nf-call-iptables=1 2>/dev/null || true
    ip route add "$service_cidr" via "$node_ip"
    ip route add "$pod_cidr" via "$node_ip"
    ;;
  down)
    ip link delete "$outer" 2>/dev/null || true
    [ ! -e "/run/netns/$namespace" ] || ip netns delete "$namespace"
    ;;
  *) echo "usage: netns.sh up|down" >&2; exit 2 ;;
esac
