-- KEYS: record, tokens, log probabilities.
local fields = redis.call('HGETALL', KEYS[1])
if #fields == 0 then
  return { 'MISSING' }
end
return { 'OK', fields, redis.call('GET', KEYS[2]) or '', redis.call('GET', KEYS[3]) or '' }
