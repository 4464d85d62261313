"""What concerns Ray itself: a cluster of this machine's own, and finding the replicas of a deployment."""
