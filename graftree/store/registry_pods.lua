-- Drops the pods whose lease is over by this server's clock; returns id, record, ... of the others.
-- KEYS: pods, leases.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local live = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  live[id] = true
end
local answer = {}
local records = redis.call('HGETALL', KEYS[1])
for index = 1, #records, 2 do
  if live[records[index]] then
    answer[#answer + 1] = records[index]
    answer[#answer + 1] = records[index + 1]
  else
    redis.call('HDEL', KEYS[1], records[index])
  end
end
return answer
