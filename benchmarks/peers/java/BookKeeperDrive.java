import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import org.apache.bookkeeper.client.api.BookKeeper;
import org.apache.bookkeeper.client.api.DigestType;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.client.api.WriteHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;

/** Drives Apache BookKeeper: {@code servers} is its metadata service URI. E = Qw = 3, Qa = 2, CRC32C. */
public final class BookKeeperDrive implements Drive.Target {
  private static final byte[] PASSWORD = new byte[0];
  // As much as the product's reader has asked for ahead: four answers of about 512 KiB.
  private static final int READS_AHEAD = 4;
  private static final int ENTRIES_PER_READ = 500;

  private final BookKeeper client;
  private final List<WriteHandle> handles = new ArrayList<>();
  private ReadHandle reader;

  private BookKeeperDrive(String uri, int ledgers) throws Exception {
    ClientConfiguration configuration = new ClientConfiguration();
    configuration.setMetadataServiceUri(uri);
    configuration.setThrottleValue(0);
    client = BookKeeper.newBuilder(configuration).build();
    List<CompletableFuture<WriteHandle>> made = new ArrayList<>();
    for (int number = 0; number < ledgers; number++) {
      made.add(
          client
              .newCreateLedgerOp()
              .withEnsembleSize(3)
              .withWriteQuorumSize(3)
              .withAckQuorumSize(2)
              .withDigestType(DigestType.CRC32C)
              .withPassword(PASSWORD)
              .execute());
    }
    for (CompletableFuture<WriteHandle> handle : made) {
      handles.add(handle.get());
    }
  }

  @Override
  public CompletableFuture<?> add(int ledger, byte[] payload) {
    return handles.get(ledger).appendAsync(payload);
  }

  @Override
  public void beginReading() throws Exception {
    long id = handles.get(0).getId();
    handles.get(0).close();
    reader =
        client
            .newOpenLedgerOp()
            .withLedgerId(id)
            .withDigestType(DigestType.CRC32C)
            .withPassword(PASSWORD)
            .execute()
            .get();
  }

  @Override
  public long readAll(long entries) throws Exception {
    ArrayDeque<CompletableFuture<LedgerEntries>> ahead = new ArrayDeque<>();
    long bytes = 0;
    long next = 0;
    while (next < entries || !ahead.isEmpty()) {
      while (next < entries && ahead.size() < READS_AHEAD) {
        long last = Math.min(entries, next + ENTRIES_PER_READ) - 1;
        ahead.add(reader.readAsync(next, last));
        next = last + 1;
      }
      try (LedgerEntries found = ahead.remove().get()) {
        for (LedgerEntry entry : found) {
          bytes += entry.getEntryBytes().length;
        }
      }
    }
    return bytes;
  }

  @Override
  public void close() throws Exception {
    client.close();
  }

  public static void main(String[] arguments) throws Exception {
    Drive.run(arguments, (servers, ledgers, inFlight) -> new BookKeeperDrive(servers, ledgers));
  }
}
