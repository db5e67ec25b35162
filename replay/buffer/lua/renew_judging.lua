-- renew_judging: (judge, ttl_ms, then group_id, fence for each) -> ids of the judge's leases that are valid for another
-- ttl_ms.
return renew('judging')
