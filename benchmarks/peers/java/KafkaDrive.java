import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CompletableFuture;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Drives Kafka: {@code servers} are its bootstrap servers. One topic with one partition for each "ledger", three
 * replicas, acks=all, min.insync.replicas=2. Whether a broker flushes before it answers is its own setting.
 */
public final class KafkaDrive implements Drive.Target {
  private final KafkaProducer<byte[], byte[]> producer;

  private KafkaDrive(String servers, int partitions, int inFlight) throws Exception {
    Properties settings = new Properties();
    settings.put("bootstrap.servers", servers);
    try (Admin admin = Admin.create(settings)) {
      NewTopic topic = new NewTopic("bench", partitions, (short) 3);
      topic.configs(Map.of("min.insync.replicas", "2"));
      admin.createTopics(java.util.List.of(topic)).all().get();
    }
    settings.put("key.serializer", ByteArraySerializer.class.getName());
    settings.put("value.serializer", ByteArraySerializer.class.getName());
    settings.put("acks", "all");
    settings.put("linger.ms", inFlight == 1 ? "0" : "1");
    settings.put("batch.size", "262144");
    settings.put("buffer.memory", String.valueOf(256L << 20));
    settings.put("max.block.ms", "60000");
    producer = new KafkaProducer<>(settings);
  }

  @Override
  public CompletableFuture<?> add(int ledger, byte[] payload) {
    CompletableFuture<Void> done = new CompletableFuture<>();
    producer.send(
        new ProducerRecord<>("bench", ledger, null, payload),
        (written, error) -> {
          if (error == null) {
            done.complete(null);
          } else {
            done.completeExceptionally(error);
          }
        });
    return done;
  }

  @Override
  public void close() {
    producer.close();
  }

  public static void main(String[] arguments) throws Exception {
    Drive.run(arguments, KafkaDrive::new);
  }
}
