"""The user's model on a rank: modules, weights, shards, shared parameters, gradients of replicas."""
