{{- /* As `up` starts its private one: on disk, and nothing is ever thrown out. */ -}}
{{- define "tandem.redisConfig" -}}
port 6379
bind * -::*
protected-mode {{ .Values.redis.auth.disabled | ternary "no" "yes" }}
dir /data
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
databases 1
daemonize no
logfile ""
{{- end }}

{{- /* The password goes from its file into another one in memory, in a form that takes any byte; never into arguments. */ -}}
{{- define "tandem.redisStart" -}}
set -eu
umask 077
cp /etc/tandem/redis/redis.conf /run/redis/redis.conf
chmod 0600 /run/redis/redis.conf
if [ -f /etc/tandem/secrets/redis-password ]; then
  password=$(cat /etc/tandem/secrets/redis-password)
  hex=$(printf %s "$password" | od -An -v -tx1 | tr -d ' \n' | sed 's/../\\x&/g')
  printf '\nrequirepass "%s"\n' "$hex" >> /run/redis/redis.conf
fi
exec redis-server /run/redis/redis.conf
{{- end }}

{{- define "tandem.redisAsk" -}}
if [ -f /etc/tandem/secrets/redis-password ]; then
  REDISCLI_AUTH=$(cat /etc/tandem/secrets/redis-password)
  export REDISCLI_AUTH
fi
[ "$(redis-cli -p 6379 ping)" = PONG ]
{{- end }}
