// argo-cd is what a sync by Argo CD needs, made of Argo CD's own packages, outside of a cluster:
//
//	argo-cd argocd-application-controller FLAG...
//	argo-cd argocd-repo-server FLAG...
//	argo-cd redis ADDRESS
//
// The first two are Argo CD's programs as they are. The third keeps what they share, in memory: the
// server that Argo CD's own tests use in Redis' place.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/alicebob/miniredis/v2"
	"github.com/spf13/cobra"

	controller "github.com/argoproj/argo-cd/v3/cmd/argocd-application-controller/commands"
	reposerver "github.com/argoproj/argo-cd/v3/cmd/argocd-repo-server/commands"
)

func main() {
	root := &cobra.Command{Use: "argo-cd", SilenceUsage: true}
	keep := &cobra.Command{Use: "redis ADDRESS", Args: cobra.ExactArgs(1), RunE: redis}
	root.AddCommand(controller.NewCommand(), reposerver.NewCommand(), keep)
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "argo-cd:", err)
		os.Exit(1)
	}
}

func redis(_ *cobra.Command, args []string) error {
	server := miniredis.NewMiniRedis()
	if err := server.StartAddr(args[0]); err != nil {
		return fmt.Errorf("listening on %s: %w", args[0], err)
	}
	defer server.Close()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	<-stop
	return nil
}
