"""The user's model on a rank: modules, weights, shards, tied parameters, gradients of replicas."""
