-- acquire_epoch: from now on every learner with an older epoch is refused.
return redis.call('INCR', epoch_key)
